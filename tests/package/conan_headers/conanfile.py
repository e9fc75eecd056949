"""The headers of a Debian package as a Conan package, named as ConanCenter's package is for CMake: where ConanCenter is not to be
had, shoal's recipe finds these in folders that the compiler does not search by itself."""

import os

from conan import ConanFile
from conan.tools.files import copy

# By name of the package: folder in /usr/include, name for find_package, target.
HEADERS = {
    "cli11": ("CLI", "CLI11", "CLI11::CLI11"),
    "fmt": ("fmt", "fmt", "fmt::fmt"),
    "nlohmann_json": ("nlohmann", "nlohmann_json", "nlohmann_json::nlohmann_json"),
}


class Headers(ConanFile):
    package_type = "header-library"

    def package(self):
        folder = HEADERS[self.name][0]
        copy(self, "*", os.path.join("/usr/include", folder), os.path.join(self.package_folder, "include", folder))

    def package_info(self):
        _, file, target = HEADERS[self.name]
        self.cpp_info.set_property("cmake_file_name", file)
        self.cpp_info.set_property("cmake_target_name", target)
        self.cpp_info.bindirs = self.cpp_info.libdirs = []
