"""The import package is ``commwatch``; its folders lie at the top of the tree. All else is in ``pyproject.toml``."""

from setuptools import find_packages, setup

#: Package by folder; the packages inside a folder are found.
ROOTS = {
    "commwatch": "agent",
    "commwatch.collectors": "collectors",
    "commwatch.alerts": "alerts",
    "commwatch.dashboards": "dashboards",
}

inside = [f"{package}.{name}" for package, folder in ROOTS.items() for name in find_packages(folder)]
setup(packages=[*ROOTS, *inside], package_dir=ROOTS)
