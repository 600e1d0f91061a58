"""What YAML can name: mixers and their parts."""
