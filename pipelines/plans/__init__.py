"""Plans: a described data set, as a graph of steps, each a command; made in order, and again only where something changed."""
