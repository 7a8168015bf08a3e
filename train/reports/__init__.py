"""Tables of the papers, published beside measured; runs side by side; figures."""
