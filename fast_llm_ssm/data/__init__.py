"""Text to packed batches."""
