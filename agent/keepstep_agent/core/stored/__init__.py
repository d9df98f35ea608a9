"""What is stored at a destination: keys, manifests, markers and packs, with their encodings."""
