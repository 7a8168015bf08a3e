"""The detector of bottom-up attention: network, input and weights."""
