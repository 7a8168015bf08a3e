"""Files on disks and in object stores, behind `schemas.storage.folder.Folder`."""
