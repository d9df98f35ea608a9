"""What can be wrong with a pod, or with us."""


class UnsupportedError(Exception):
    """The manifest asks for something that the simulator does not play: a test must not believe that it did."""


class ContainerConfigError(Exception):
    """Kubelet cannot make the container from what the manifest says: CreateContainerConfigError in its status."""
