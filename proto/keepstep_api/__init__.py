"""What the trainer's side and the agent's side agree on: the wire API, every shared name, and the version."""

# Here, and not asked of the installed package: that would take half the time of `keepstep ready`, and a client that was
# injected into a pod lies in a volume and is not installed.
__version__ = "0.1.0"
