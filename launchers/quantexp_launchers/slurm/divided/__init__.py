"""Work beside training as jobs: an array of tasks makes partial results, a last job joins them."""
