"""S3 and stores that imitate it: connecting, probing what a store enforces, the operations, what its errors mean."""
