"""Call anyone's model, reproducibly: build, call, sizes, arguments, cases."""
