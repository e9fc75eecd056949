// The precompiled header is built with this file; every target that uses libtorch shares it.
