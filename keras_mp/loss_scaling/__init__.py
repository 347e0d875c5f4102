"""Loss scaling: scale the loss, check the gradients on all replicas, skip or update."""
