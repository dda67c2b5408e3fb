"""Record what each line of a run computes, and compare two runs."""
