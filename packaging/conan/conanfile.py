"""Conan recipe: conan create packaging/conan -o 'shoal/*:torch=/path/to/libtorch'

libtorch is in no Conan registry; the option names its folder, the one that holds share/cmake/Torch."""

import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load
from conan.tools.system.package_manager import Apt


class ShoalConan(ConanFile):
    name = "shoal"
    license = "Apache-2.0"
    description = "Data-parallel training in C++ on libtorch"
    package_type = "shared-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"torch": ["ANY"], "mpi": [True, False]}
    default_options = {"torch": "", "mpi": False}  # mpi: the transport of that name, with the system's MPI
    requires = "cli11/2.4.2", "fmt/10.2.1", "nlohmann_json/3.11.3", "openssl/[>=3 <4]", "zlib/[>=1.2.11 <2]"

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, "..", "..", "CMakeLists.txt"))
        self.version = re.search(r"project\(shoal VERSION ([0-9.]+)", text).group(1)

    def system_requirements(self):
        # Of Gloo the headers alone: libtorch has the code, and no registry of Conan's has the headers.
        Apt(self).install(["libgloo-dev"] + (["libopenmpi-dev"] if self.options.mpi else []))

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("shoal runs on Linux only")
        if str(self.settings.compiler.libcxx) == "libstdc++":
            raise ConanInvalidConfiguration("libtorch has the C++11 ABI: set compiler.libcxx=libstdc++11")
        if not os.path.isdir(os.path.join(str(self.options.torch), "share", "cmake", "Torch")):
            raise ConanInvalidConfiguration(
                f"option torch is '{self.options.torch}': give libtorch's folder, which holds share/cmake/Torch")

    def export_sources(self):
        root = os.path.join(self.recipe_folder, "..", "..")
        for name in ("CMakeLists.txt", "LICENSE"):
            copy(self, name, root, self.export_sources_folder)
        for folder in ("cmake", "include", "src"):
            copy(self, "*", os.path.join(root, folder), os.path.join(self.export_sources_folder, folder))

    def layout(self):
        self.folders.root = os.path.join("..", "..")  # where the sources are for `conan build packaging/conan`
        cmake_layout(self, build_folder="build-conan")

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["SHOAL_BUILD_TESTS"] = False
        toolchain.cache_variables["SHOAL_BUILD_BENCH"] = False
        toolchain.cache_variables["SHOAL_BUILD_PYTHON"] = False
        toolchain.cache_variables["SHOAL_TORCH"] = str(self.options.torch)
        toolchain.cache_variables["CMAKE_DISABLE_FIND_PACKAGE_MPI"] = not self.options.mpi
        toolchain.cache_variables["CMAKE_UNITY_BUILD"] = True  # half the time of a build from nothing
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # find_package(shoal) reads the package's own shoalConfig.cmake.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "shoal")]
        self.cpp_info.libs = ["shoal"]
