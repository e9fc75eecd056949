# written by others
