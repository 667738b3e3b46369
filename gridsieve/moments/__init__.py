"""The moments of a folder of films: found by what a text says, with vectors that a model makes of each shot."""

from gridsieve.moments.folder_index import FolderIndex as FolderIndex
from gridsieve.moments.update import Progress as Progress
from gridsieve.moments.update import Skipped as Skipped
from gridsieve.search.films import FilmMoment as FilmMoment
