"""Models: encoders, similarities and the joint embedding."""
