"""What is stored at a destination: keys, manifests, markers, packs, and their encodings."""
