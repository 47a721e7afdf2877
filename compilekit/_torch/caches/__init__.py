"""Private torch names of the cache route: keys, kernels, Dynamo packages, events.

Each module states which files of torch 2.11 and 2.13 it follows. Importing this
package imports nothing; its modules import Dynamo and Inductor, and are themselves
imported only by a build or by `compilekit.restore`.
"""
