"""Looking at datasets: inspecting, comparing, drawing."""
