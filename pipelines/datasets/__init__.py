"""Looking at datasets: inspection, comparison, drawing."""
