// make_private LIBRARY COPY
//
// Copies a shared library so that its references to its own symbols always end in itself. The
// distribution's libsentencepiece carries and exports an old protobuf. Loaded beside a newer
// libprotobuf it would call into that one, and abort. Two things bind a symbol elsewhere:
// - the loader asks the whole program first, unless the library says DF_SYMBOLIC;
// - a symbol bound "unique" (statics of templates and inline functions) is one for the process.
// The copy says DF_SYMBOLIC, and its unique symbols are plain global ones. Nothing else differs.
#include <elf.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>

namespace {

// A 64-bit ELF file of this machine's byte order, edited in place.
class SharedLibrary {
 public:
  explicit SharedLibrary(std::string bytes) : bytes_(std::move(bytes)) {
    const Elf64_Ehdr& header = at<Elf64_Ehdr>(0);
    const uint16_t one = 1;
    const bool little = *reinterpret_cast<const unsigned char*>(&one) == 1;
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_type != ET_DYN ||
        header.e_ident[EI_CLASS] != ELFCLASS64 ||
        header.e_ident[EI_DATA] != (little ? ELFDATA2LSB : ELFDATA2MSB)) {
      throw std::runtime_error("not a 64-bit ELF shared library of this machine's byte order");
    }
  }

  // What DT_SONAME says; empty when it is not there.
  std::string soname() {
    const Elf64_Dyn* name = find(DT_SONAME);
    const Elf64_Dyn* strings = find(DT_STRTAB);
    if (name == nullptr || strings == nullptr) return "";
    const uint64_t begin = file_offset(strings->d_un.d_ptr) + name->d_un.d_val;
    at<char>(begin);  // checks that it lies in the file
    return bytes_.substr(begin, bytes_.find('\0', begin) - begin);
  }

  void bind_to_itself_first() {
    if (Elf64_Dyn* flags = find(DT_FLAGS)) {
      flags->d_un.d_val |= DF_SYMBOLIC;
      return;
    }
    if (find(DT_SYMBOLIC) != nullptr) return;
    const Elf64_Phdr& segment = dynamic_segment();
    const size_t count = segment.p_filesz / sizeof(Elf64_Dyn);
    for (size_t i = 0; i + 1 < count; ++i) {  // the last entry stays DT_NULL, the table's end
      Elf64_Dyn& entry = at<Elf64_Dyn>(segment.p_offset + i * sizeof(Elf64_Dyn));
      if (entry.d_tag != DT_NULL) continue;
      entry.d_tag = DT_SYMBOLIC;
      return;
    }
    throw std::runtime_error("it has no DT_FLAGS, and no room in its dynamic section to add one");
  }

  // Returns how many there were.
  int make_unique_symbols_global() {
    const Elf64_Shdr& table = dynamic_symbols();
    int changed = 0;
    for (uint64_t i = 0; i < table.sh_size / sizeof(Elf64_Sym); ++i) {
      Elf64_Sym& symbol = at<Elf64_Sym>(table.sh_offset + i * sizeof(Elf64_Sym));
      if (ELF64_ST_BIND(symbol.st_info) != STB_GNU_UNIQUE) continue;
      symbol.st_info = ELF64_ST_INFO(STB_GLOBAL, ELF64_ST_TYPE(symbol.st_info));
      ++changed;
    }
    return changed;
  }

  const std::string& bytes() const { return bytes_; }

 private:
  template <typename T>
  T& at(uint64_t offset) {
    if (offset > bytes_.size() || bytes_.size() - offset < sizeof(T) || offset % alignof(T) != 0) {
      throw std::runtime_error("truncated or damaged: an offset points outside the file");
    }
    return *reinterpret_cast<T*>(bytes_.data() + offset);
  }

  Elf64_Phdr& segment(int index) {
    return at<Elf64_Phdr>(at<Elf64_Ehdr>(0).e_phoff + index * sizeof(Elf64_Phdr));
  }

  const Elf64_Phdr& dynamic_segment() {
    for (int i = 0; i < at<Elf64_Ehdr>(0).e_phnum; ++i) {
      if (segment(i).p_type == PT_DYNAMIC) return segment(i);
    }
    throw std::runtime_error("it has no dynamic section");
  }

  Elf64_Dyn* find(int64_t tag) {
    const Elf64_Phdr& segment = dynamic_segment();
    for (size_t i = 0; i < segment.p_filesz / sizeof(Elf64_Dyn); ++i) {
      Elf64_Dyn& entry = at<Elf64_Dyn>(segment.p_offset + i * sizeof(Elf64_Dyn));
      if (entry.d_tag == tag) return &entry;
      if (entry.d_tag == DT_NULL) break;
    }
    return nullptr;
  }

  const Elf64_Shdr& dynamic_symbols() {
    const Elf64_Ehdr& header = at<Elf64_Ehdr>(0);
    for (int i = 0; i < header.e_shnum; ++i) {
      const auto& section = at<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr));
      if (section.sh_type == SHT_DYNSYM && section.sh_entsize == sizeof(Elf64_Sym)) return section;
    }
    throw std::runtime_error("it has no section header for its dynamic symbols");
  }

  uint64_t file_offset(uint64_t address) {
    for (int i = 0; i < at<Elf64_Ehdr>(0).e_phnum; ++i) {
      const Elf64_Phdr& load = segment(i);
      if (load.p_type != PT_LOAD || address < load.p_vaddr) continue;
      if (address - load.p_vaddr < load.p_filesz) return address - load.p_vaddr + load.p_offset;
    }
    throw std::runtime_error("an address lies in no segment of the file");
  }

  std::string bytes_;
};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot be opened");
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

// Written beside and renamed, so that a process that has the old copy mapped keeps it whole.
void write(const std::string& path, const std::string& bytes) {
  const std::string beside = path + ".new";
  std::ofstream file(beside, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), std::streamsize(bytes.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + beside);
  std::filesystem::rename(beside, path);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: make_private LIBRARY COPY\n");
    return 2;
  }
  try {
    SharedLibrary library(read(argv[1]));
    const std::string name = std::filesystem::path(argv[2]).filename().string();
    // Whatever is linked against the copy will ask the loader for this name.
    if (library.soname() != name) {
      throw std::runtime_error("its DT_SONAME is '" + library.soname() + "', expected '" + name +
                               "', the copy's file name");
    }
    library.bind_to_itself_first();
    library.make_unique_symbols_global();
    write(argv[2], library.bytes());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "make_private: %s: %s\n", argv[1], error.what());
    return 1;
  }
  return 0;
}
