"""All that generated code imports: meshes, collectives, parameters, optimizers, random numbers.

Nothing here knows the compiler.
"""
