"""Pages for people: sheets of search results, reports of datasets and runs."""
