// Gives the files that are its arguments to a fuzz target, one after the other,
// where there is no libFuzzer: the target ends the program if one of them
// breaks its rules.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "the corpus is empty" << std::endl;
    return EXIT_FAILURE;
  }
  for (int i = 1; i < argc; ++i) {
    std::cout << argv[i] << std::endl;
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::cerr << "can't open " << argv[i] << std::endl;
      return EXIT_FAILURE;
    }
    const std::string input((std::istreambuf_iterator<char>(file)),
                            std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()),
                           input.size());
  }
  return EXIT_SUCCESS;
}
