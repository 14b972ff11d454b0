"""Buckets: objects of S3, Google Cloud Storage and Azure, as a store and as the home of a run."""
