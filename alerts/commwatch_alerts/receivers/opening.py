"""Makes the receivers that the settings describe."""

from __future__ import annotations

from collections.abc import Sequence

from commwatch_alerts.outbox import Policy
from commwatch_alerts.receivers.command import Command
from commwatch_alerts.receivers.hooks import (
    ALERTMANAGER_LINGER_S,
    ALERTMANAGER_REPEAT_S,
    Alertmanager,
    Login,
    Slack,
    Webhook,
)
from commwatch_alerts.receivers.sending import Receiver
from commwatch_alerts.receivers.settings import ALERTMANAGER, SLACK, WEBHOOK, ReceiverConfig


def receivers(asked: Sequence[ReceiverConfig], agent_url: str) -> list[Receiver]:
    """Return the receivers; each URL of an Alertmanager becomes one.

    Args:
        agent_url: URL of the agent, for links in messages.
    """
    hidden = frozenset(secret.variable for each in asked for secret in each.secrets if secret.variable is not None)
    return [receiver for each in asked for receiver in _receivers(each, agent_url, hidden)]


def _receivers(asked: ReceiverConfig, agent_url: str, hidden: frozenset[str]) -> list[Receiver]:
    login = Login(asked.token, asked.username, asked.password)
    policy = Policy(asked.repeat_s, send_resolved=asked.send_resolved, severity=asked.severity)
    if asked.kind == ALERTMANAGER:
        often = Policy(ALERTMANAGER_REPEAT_S, ALERTMANAGER_LINGER_S, grouped=False, severity=asked.severity)
        several = len(asked.urls) > 1
        return [
            Alertmanager(f"{asked.name}/{number}" if several else asked.name, often, url, agent_url, login)
            for number, url in enumerate(asked.urls, 1)
        ]
    if asked.kind == WEBHOOK:
        return [Webhook(asked.name, policy, asked.url or asked.urls[0], agent_url, login)]
    if asked.kind == SLACK:
        assert asked.url is not None
        return [Slack(asked.name, policy, asked.url, agent_url)]
    return [Command(asked.name, policy, asked.command, agent_url, hidden)]
