"""What a site installs: the probe's folder, manifests for Kubernetes, Slurm and systemd."""
