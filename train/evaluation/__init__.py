"""What a trained model retrieves: metrics, scores, embeddings, search."""
