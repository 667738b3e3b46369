"""The search in an index of films: vectors of their moments in a store, of which a text's nearest are found.

It neither reads films nor makes an index, which `gridsieve.moments` does, so that the gateway may import it.
"""
