package rdmanet

import (
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

func init() { regmem.AdviseHuge = os.Getenv("RDMANET_HUGE_PAGES") == "1" } // also in processes of benchmarks

// residentBytes is how much of a mapping of whole pages is in memory.
func residentBytes(t testing.TB, b []byte) (n int) {
	t.Helper()
	page := os.Getpagesize()
	vec := make([]byte, (len(b)+page-1)/page)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(unsafe.Pointer(&vec[0])))
	require.Zero(t, errno)
	for _, v := range vec {
		n += int(v&1) * page
	}
	return n
}
