{{- define "commwatch.name" -}}
{{- $default := .Release.Name }}
{{- if not (contains "commwatch" .Release.Name) }}{{ $default = printf "%s-commwatch" .Release.Name }}{{ end }}
{{- .Values.fullnameOverride | default $default | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "commwatch.labels" -}}
{{- $own := dict "app.kubernetes.io/name" "commwatch" "app.kubernetes.io/instance" (include "commwatch.name" .) }}
{{- merge $own .Values.commonLabels | toJson }}
{{- end }}

{{/* How Prometheus' operator gives each series the names of its node and pod, and labels of the node. */}}
{{- define "commwatch.relabelings" -}}
{{- $pod := dict "sourceLabels" (list "__meta_kubernetes_namespace" "__meta_kubernetes_pod_name") "separator" "/" "targetLabel" "instance" }}
{{- $node := list "__meta_kubernetes_pod_controller_kind" "__meta_kubernetes_pod_node_name" }}
{{- $node = dict "sourceLabels" $node "regex" "DaemonSet;(.+)" "targetLabel" "instance" }}
{{- $made := list $pod $node (dict "sourceLabels" (list "__meta_kubernetes_pod_node_name") "targetLabel" "node") }}
{{- range $name, $label := .Values.nodeLabels }}
{{- $source := printf "__meta_kubernetes_node_label_%s" (regexReplaceAll "[^A-Za-z0-9_]" $name "_") }}
{{- $made = append $made (dict "sourceLabels" (list $source) "targetLabel" $label) }}
{{- end }}
{{- toJson $made }}
{{- end }}

{{/* Not empty if the agents listen only on loopback. */}}
{{- define "commwatch.loopback" -}}
{{- if has .Values.settings.host (list "127.0.0.1" "::1" "localhost") }}yes{{ end }}
{{- end }}

{{/* Name of the Secret with the agents' certificate; empty: no TLS. */}}
{{- define "commwatch.tls" -}}
{{- $made := ternary (printf "%s-tls" (include "commwatch.name" .)) "" (not (empty .Values.tls.issuer.name)) }}
{{- .Values.tls.existingSecret | default $made }}
{{- end }}

{{/* The settings as commwatch.toml: texts, numbers and lists are written as in JSON. */}}
{{- define "commwatch.toml" -}}
{{- range $key, $value := omit . "receivers" }}
{{- if not (kindIs "map" $value) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- range $key, $value := omit . "kinds" }}
{{- if kindIs "map" $value }}
[{{ $key }}]
{{- include "commwatch.keys" $value }}
{{- end }}
{{- end }}
{{- range $name, $table := .kinds }}
[kinds.{{ toJson $name }}]
{{- include "commwatch.keys" $table }}
{{- end }}
{{- range .receivers }}
[[receivers]]
{{- include "commwatch.keys" . }}
{{- end }}
{{- end }}

{{- define "commwatch.keys" -}}
{{- range $key, $value := . }}
{{ toJson $key }} = {{ toJson $value }}
{{- end }}
{{- end }}

{{/* Where the agent has its settings and secrets, and the volumes for them. */}}
{{- define "commwatch.mounts" -}}
{{- $found := list }}
{{- if .Values.settings }}
{{- $found = append $found (dict "name" "settings" "mountPath" "/etc/commwatch-settings" "readOnly" true) }}
{{- end }}
{{- if include "commwatch.tls" . }}
{{- $found = append $found (dict "name" "tls" "mountPath" "/etc/commwatch-tls" "readOnly" true) }}
{{- end }}
{{- range .Values.secrets }}
{{- $place := printf "/etc/commwatch-secrets/%s" . }}
{{- $found = append $found (dict "name" (printf "secret-%s" .) "mountPath" $place "readOnly" true) }}
{{- end }}
{{- toJson (concat $found .Values.extraVolumeMounts) }}
{{- end }}

{{- define "commwatch.volumes" -}}
{{- $found := list }}
{{- if .Values.settings }}
{{- $map := printf "%s-settings" (include "commwatch.name" .) }}
{{- $found = append $found (dict "name" "settings" "configMap" (dict "name" $map)) }}
{{- end }}
{{- with include "commwatch.tls" . }}
{{- $found = append $found (dict "name" "tls" "secret" (dict "secretName" . "defaultMode" 288)) }}
{{- end }}
{{- range .Values.secrets }}
{{- $found = append $found (dict "name" (printf "secret-%s" .) "secret" (dict "secretName" . "defaultMode" 288)) }}
{{- end }}
{{- toJson (concat $found .Values.extraVolumes) }}
{{- end }}

{{/* What the kubelet asks for a state of health: over TLS without a look at the certificate; on loopback if the agent is only there. */}}
{{- define "commwatch.get" -}}
{{- $found := dict "port" "metrics" "path" .path }}
{{- if include "commwatch.tls" .root }}{{ $_ := set $found "scheme" "HTTPS" }}{{ end }}
{{- if include "commwatch.loopback" .root }}{{ $_ := set $found "host" "127.0.0.1" }}{{ end }}
{{- toJson $found }}
{{- end }}

{{/* TLS and token of Prometheus' requests. */}}
{{- define "commwatch.access" -}}
{{- $v := .Values }}
{{- $found := dict }}
{{- with include "commwatch.tls" . }}
{{- $tls := dict "serverName" ($v.tls.serverName | default (printf "%s.%s.svc" (include "commwatch.name" $) $.Release.Namespace)) }}
{{- if $v.tls.caKey }}{{ $_ := set $tls "ca" (dict "secret" (dict "name" . "key" $v.tls.caKey)) }}{{ end }}
{{- $_ := merge $found (dict "scheme" "https" "tlsConfig" (merge $tls $v.tls.monitor)) }}
{{- end }}
{{- if $v.settings.require_token_for_metrics }}
{{- $_ := set $found "authorization" (dict "credentials" (dict "name" $v.token.existingSecret "key" "token")) }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* Values that would make agents that nobody reaches, or that everybody can listen to. */}}
{{- define "commwatch.check" -}}
{{- $v := .Values }}
{{- $local := include "commwatch.loopback" . }}
{{- if and $v.hostNetwork (not $local) (not (include "commwatch.tls" .)) (not $v.settings.insecure) }}
{{- fail "hostNetwork: everybody who reaches the node could listen to the agent's port; set tls.existingSecret or tls.issuer.name, or settings.host to 127.0.0.1, or settings.insecure to true" }}
{{- end }}
{{- if and $local (not $v.hostNetwork) }}
{{- fail "settings.host: the kubelet and Prometheus do not reach an agent on the pod's loopback; remove it, or set hostNetwork" }}
{{- end }}
{{- if and $v.settings.require_token_for_metrics (not $v.token.existingSecret) }}
{{- fail "settings.require_token_for_metrics: Prometheus needs the agents' token; set token.existingSecret" }}
{{- end }}
{{- include "commwatch.check-settings" . }}
{{- end }}

{{/* Settings that an agent refuses although each by itself is right. */}}
{{- define "commwatch.check-settings" -}}
{{- $s := .Values.settings }}
{{- if not (include "commwatch.tls" .) }}
{{- if $s.tls_client_ca }}
{{- fail "settings.tls_client_ca: needs TLS; set tls.existingSecret or tls.issuer.name" }}
{{- end }}
{{- if and (hasKey $s "insecure") (not $s.insecure) (not (include "commwatch.loopback" .)) }}
{{- fail "settings.insecure: without TLS it must not be false, because others reach the agent; remove it, or set tls.existingSecret or tls.issuer.name" }}
{{- end }}
{{- end }}
{{- range list "otlp_headers_file" "otlp_ca_file" "otlp_client_cert" }}
{{- if and (hasKey $s .) (not $s.otlp_endpoint) }}
{{- fail (printf "settings.%s: needs otlp_endpoint" .) }}
{{- end }}
{{- end }}
{{- $names := dict }}
{{- range $s.receivers }}
{{- $name := .name | default .kind }}
{{- if hasKey $names $name }}
{{- fail (printf "settings.receivers: two have the name %s; give each its own" $name) }}
{{- end }}
{{- $_ := set $names $name true }}
{{- end }}
{{- with $s.thresholds }}
{{- $list := $.Files.Get "files/rules.yaml" | fromYaml }}
{{- range $upper, $lower := $list.not_below }}
{{- $high := ternary (get $s.thresholds $upper) (get $list.thresholds $upper) (hasKey $s.thresholds $upper) | float64 }}
{{- $low := ternary (get $s.thresholds $lower) (get $list.thresholds $lower) (hasKey $s.thresholds $lower) | float64 }}
{{- if gt $low $high }}
{{- fail (printf "settings.thresholds: %s (%g) must not be above %s (%g)" $lower $low $upper $high) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The fields of the objects, as `commwatch manifest k8s` fills them. An empty field's lines are left out. */}}
{{- define "commwatch.fields" -}}
{{- $v := .Values }}
{{- $s := .Values.settings }}
{{- include "commwatch.check" . }}
{{- $name := include "commwatch.name" . }}
{{- $tls := include "commwatch.tls" . }}
{{- $get := not $s.tls_client_ca }}
{{- $fields := dict
  "name" $name
  "namespace" .Release.Namespace
  "labels" (include "commwatch.labels" . | fromJson)
  "image" (printf "%s:%s" $v.image.repository ($v.image.tag | default .Chart.AppVersion))
  "port" $v.port
  "uid" $v.user
  "gid" $v.group
  "monitoring" $v.monitoringNamespace
  "runtime_class" $v.runtimeClassName
  "resources" $v.resources
  "relabelings" (include "commwatch.relabelings" . | fromJsonArray)
  "attach_node" (not (empty $v.nodeLabels))
  "args" (concat (list "agent") $v.extraArgs)
  "config" (ternary "/etc/commwatch-settings/commwatch.toml" "" (not (empty $s)))
  "host" (ternary "" "0.0.0.0" (hasKey $s "host"))
  "insecure" (ternary "" "true" (or (hasKey $s "insecure") (not (empty $tls)) $v.hostNetwork))
  "require_token" (ternary "" "true" (hasKey $s "require_token"))
  "healthz" (ternary (include "commwatch.get" (dict "root" . "path" "/healthz") | fromJson) "" $get)
  "readyz" (ternary (include "commwatch.get" (dict "root" . "path" "/readyz") | fromJson) "" $get)
  "connection" (ternary "" (dict "port" "metrics") $get)
  "access" (include "commwatch.access" . | fromJson)
}}
{{- if $tls }}
{{- $_ := merge $fields (dict
  "tls_cert" "/etc/commwatch-tls/tls.crt"
  "tls_key" "/etc/commwatch-tls/tls.key"
  "ca_file" (ternary "" (printf "/etc/commwatch-tls/%s" $v.tls.caKey) (or (hasKey $s "ca_file") (empty $v.tls.caKey)))
) }}
{{- end }}
{{- if or $tls $v.token.existingSecret $v.secrets }}{{ $_ := set $fields "secret_group" $v.group }}{{ end }}
{{- with $v.token.existingSecret }}
{{- $_ := merge $fields (dict
  "token_secret" .
  "token_folder" "/etc/commwatch-token"
  "token_file" "/etc/commwatch-token/token"
  "token_mode" 288
) }}
{{- end }}
{{- if eq $v.mode "sidecar" }}
{{- $claim := $v.history.existingClaim }}
{{- if $v.history.size }}{{ $claim = printf "%s-history" $name }}{{ end }}
{{- $_ := merge $fields (dict
  "job_name" (printf "%s-job" $name)
  "trainer_image" $v.trainer.image
  "trainer_command" $v.trainer.command
  "gpus" $v.trainer.gpus
  "history_claim" $claim
  "history_size" $v.history.size
  "state_volume" (ternary "" "state" (not (empty $claim)))
  "access_mode" $v.history.accessMode
) }}
{{- else }}
{{- if and $v.token.existingSecret (not (hasKey $s "peers")) (not $tls) }}
{{- $_ := set $fields "peers" (printf "dns+%s:%v" $name $v.port) }}
{{- end }}
{{- $_ := merge $fields (dict
  "host_network" $v.hostNetwork
  "node_field" "spec.nodeName"
  "dns_policy" (ternary "ClusterFirstWithHostNet" "" $v.hostNetwork)
  "peer_name" (ternary $name "" (or (not (empty $fields.peers)) (not (empty $s.peers))))
) }}
{{- end }}
{{- toJson $fields }}
{{- end }}
