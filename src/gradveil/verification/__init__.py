"""What a promise is worth in the software that runs: canary records through a real pipeline, measured from outside."""
