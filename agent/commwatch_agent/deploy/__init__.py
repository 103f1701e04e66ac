"""Files that a site installs: the probe's folder, and manifests for Kubernetes, Slurm and systemd."""
