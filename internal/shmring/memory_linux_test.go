package shmring

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// What one end makes the other end reads, and cannot write, shrink or give back.
func TestMemory(t *testing.T) {
	fd, mem, err := Create(MinRing)
	require.NoError(t, err)
	defer Release(mem)
	defer unix.Close(fd)
	theirs, err := Map(fd, MinRing)
	require.NoError(t, err)
	defer Release(theirs)
	mem[5] = 7
	require.EqualValues(t, 7, theirs[5])

	require.ErrorIs(t, unix.Ftruncate(fd, 0), unix.EPERM)
	require.ErrorIs(t, unix.Ftruncate(fd, 2*MinRing), unix.EPERM)
	require.ErrorIs(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, MinRing), unix.EPERM)
	_, err = unix.Mmap(fd, 0, MinRing, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.ErrorIs(t, err, unix.EPERM)
	require.ErrorIs(t, unix.Mprotect(theirs, unix.PROT_READ|unix.PROT_WRITE), unix.EACCES)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	require.ErrorIs(t, err, unix.EPERM)
	_, err = unix.Pwrite(fd, []byte{1}, 0)
	require.ErrorIs(t, err, unix.EPERM)
	unix.Madvise(mem, unix.MADV_REMOVE) // which is refused, or does nothing under an emulator
	require.EqualValues(t, 7, theirs[5])
}

// Memory of which a peer could take something away is not mapped.
func TestMapRefuses(t *testing.T) {
	memfd := func(flags, size int, allocate bool, seals int) func(t *testing.T) int {
		return func(t *testing.T) int {
			fd, err := unix.MemfdCreate("test", flags|unix.MFD_CLOEXEC)
			if flags&unix.MFD_HUGETLB != 0 && err != nil {
				t.Skip("no huge pages: ", err)
			}
			require.NoError(t, err)
			require.NoError(t, unix.Ftruncate(fd, int64(size)))
			if allocate {
				require.NoError(t, unix.Fallocate(fd, 0, 0, int64(size)))
			}
			if flags&unix.MFD_ALLOW_SEALING != 0 {
				_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
				require.NoError(t, err)
			}
			return fd
		}
	}
	const sealing = unix.MFD_ALLOW_SEALING
	for name, open := range map[string]func(t *testing.T) int{
		"no seals":         memfd(0, MinRing, true, 0),
		"none yet":         memfd(sealing, MinRing, true, 0),
		"may shrink":       memfd(sealing, MinRing, true, sealed&^unix.F_SEAL_SHRINK),
		"may grow":         memfd(sealing, MinRing, true, sealed&^unix.F_SEAL_GROW),
		"may have holes":   memfd(sealing, MinRing, true, sealed&^unix.F_SEAL_FUTURE_WRITE),
		"may get seals":    memfd(sealing, MinRing, true, sealed&^unix.F_SEAL_SEAL),
		"too small":        memfd(sealing, MinRing/2, true, sealed),
		"too large":        memfd(sealing, 2*MinRing, true, sealed),
		"pages missing":    memfd(sealing, MinRing, false, sealed),
		"huge pages":       memfd(sealing|unix.MFD_HUGETLB, 2<<20, false, sealed),
		"no shared memory": func(t *testing.T) int { fd, _ := unix.Eventfd(0, 0); return fd },
		"a file":           func(t *testing.T) int { return file(t, t.TempDir()) },
		"a file in /dev/shm": func(t *testing.T) int {
			if _, err := os.Stat("/dev/shm"); err != nil {
				t.Skip(err)
			}
			return file(t, "/dev/shm")
		},
		"closed": func(*testing.T) int { return -1 },
	} {
		t.Run(name, func(t *testing.T) {
			fd := open(t)
			defer unix.Close(fd)
			mem, err := Map(fd, MinRing)
			require.Error(t, err)
			require.Nil(t, mem)
		})
	}
}

// file returns a descriptor of a file without a name in dir, as long as a ring.
func file(t *testing.T, dir string) int {
	f, err := os.CreateTemp(dir, "")
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, os.Remove(f.Name()))
	_, err = f.Write(make([]byte, MinRing))
	require.NoError(t, err)
	fd, err := unix.Dup(int(f.Fd()))
	require.NoError(t, err)
	return fd
}
