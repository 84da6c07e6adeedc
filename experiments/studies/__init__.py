"""Studies: experiments of several runs, with their results kept."""
