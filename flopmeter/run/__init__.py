"""Scripts as they are: a device named cuda, what torch.cuda answers, the steps of a program, shims of libraries."""
