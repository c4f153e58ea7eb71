"""Matrix products, einsum, linear algebra."""
