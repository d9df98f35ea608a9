"""What the agent serves: gRPC on the volume's socket, probes and metrics over HTTP."""
