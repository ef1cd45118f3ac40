package shmring

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// sealed has the seals that memory must have. Nobody can change its size, map it again for
// writing or give back a part of it, which would free pages that the peer reads. F_SEAL_SEAL
// keeps the peer from adding seals that the owner's writes would fail of.
const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL

const noExec = 8 // noExec is MFD_NOEXEC_SEAL, which Linux has had since 6.3.

// withoutNoExec is set when the kernel does not know noExec.
var withoutNoExec atomic.Bool

// Create makes memory of size bytes, which is zero, and returns it mapped for writing. fd
// is for the peer, and the caller closes it. The memory exists until both ends have unmapped
// it. Nothing in a file system refers to it.
func Create(size int) (fd int, mem []byte, err error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if !withoutNoExec.Load() {
		if fd, err = unix.MemfdCreate("rdmanet", flags|noExec); err == unix.EINVAL {
			withoutNoExec.Store(true)
		}
	}
	if withoutNoExec.Load() {
		fd, err = unix.MemfdCreate("rdmanet", flags)
	}
	if err != nil {
		return -1, nil, os.NewSyscallError("memfd_create", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
			fd = -1
		}
	}()
	// The pages are allocated now. If that is not possible there is an error, and not a
	// signal when the memory is used.
	if err = ignoringEINTR(func() error { return unix.Fallocate(fd, 0, 0, int64(size)) }); err != nil {
		return fd, nil, os.NewSyscallError("fallocate", err)
	}
	if mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return fd, nil, os.NewSyscallError("mmap", err)
	}
	if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sealed); err != nil {
		Release(mem)
		return fd, nil, os.NewSyscallError("fcntl", err)
	}
	return fd, mem, nil
}

// Map maps memory that the peer has made with Create and sent as fd, for reading. It
// returns an error unless the memory has size bytes and cannot become smaller. The caller
// closes fd.
func Map(fd, size int) ([]byte, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("the peer's descriptor is not of shared memory: %w", os.NewSyscallError("fcntl", err))
	}
	if seals&sealed != sealed {
		return nil, fmt.Errorf("the peer's shared memory has the seals %#x and not all of %#x", seals, sealed)
	}
	var fs unix.Statfs_t
	if err := ignoringEINTR(func() error { return unix.Fstatfs(fd, &fs) }); err != nil {
		return nil, os.NewSyscallError("fstatfs", err)
	}
	if fs.Type != unix.TMPFS_MAGIC {
		return nil, errors.New("the peer's shared memory is of another kind, such as huge pages")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if st.Size != int64(size) {
		return nil, fmt.Errorf("the peer's shared memory has %d bytes and not %d", st.Size, size)
	}
	// A page that is missing would be allocated when it is read, which may end the process
	// if there is no memory. No page can be given back, because of the seals.
	if st.Blocks*512 < int64(size) {
		return nil, errors.New("the peer's shared memory has pages that are not allocated")
	}
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE)
	return mem, os.NewSyscallError("mmap", err)
}

// Release unmaps memory of Create or Map. nil is allowed.
func Release(mem []byte) {
	if mem != nil {
		unix.Munmap(mem)
	}
}

func ignoringEINTR(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}
