"""The embedding worker: from a batch's ids to its pooled embeddings, and back."""
