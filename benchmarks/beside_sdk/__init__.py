"""What Keepstep and the OpenShift AI SDK cost a training with Hugging Face's Trainer, in turn."""
