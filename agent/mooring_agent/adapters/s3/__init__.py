"""S3 and what calls itself so: connecting, probing what a store enforces, the operations, what its errors mean."""
