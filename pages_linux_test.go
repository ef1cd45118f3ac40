package rdmanet

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() { adviseHuge = os.Getenv("RDMANET_HUGE_PAGES") == "1" } // also in processes of benchmarks

// mappingOf returns the lines of /proc/self/smaps about the mapping that b lies in.
func mappingOf(t testing.TB, b []byte) map[string]string {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	require.NoError(t, err)
	defer f.Close()
	at := uint64(addressOf(b))
	var fields map[string]string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var from, to uint64
		if n, _ := fmt.Sscanf(lines.Text(), "%x-%x ", &from, &to); n == 2 {
			if fields != nil {
				break
			}
			if from <= at && at < to {
				fields = make(map[string]string)
			}
		} else if name, value, ok := strings.Cut(lines.Text(), ":"); ok && fields != nil {
			fields[name] = strings.TrimSpace(value)
		}
	}
	require.NotNil(t, fields, "no mapping at %#x", at)
	return fields
}

// Memory that is touched here and there has small pages, whatever the system's setting
// is; Buffers that are as large as a huge page may have such.
func TestPageSizes(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		t.Skip("this kernel has no transparent huge pages, and tells nothing of them")
	}
	checkLeaks(t)
	setScratchIdle(t, 0)
	for _, huge := range []bool{false, true} {
		was := adviseHuge
		adviseHuge = huge
		a, b := pipeOn(t, Config{})
		adviseHuge = was
		chunk := a.getChunk()
		require.NotNil(t, chunk)
		receive, err := a.pool.get()
		require.NoError(t, err)
		t.Cleanup(func() {
			receive.release()
			chunk.release()
			a.Close()
			b.Close()
		})
		require.NoError(t, a.probeMem.hold(a.dom))
		for name, mem := range map[string][]byte{
			"receives": receive.slab.mem, "a chunk": chunk.b, "the pulse": a.probeMem.buf.slab.mem,
			"small Buffers": alloc(t, 100).b, "a Buffer": alloc(t, hugeSpan-pageSize).b,
		} {
			require.Contains(t, strings.Fields(mappingOf(t, mem)["VmFlags"]), "nh", name)
		}
		flags := strings.Fields(mappingOf(t, alloc(t, 2*hugeSpan).b)["VmFlags"])
		require.Contains(t, flags, "hg")
		require.NotContains(t, flags, "nh")
	}
}

// residentBytes is how much of a mapping of whole pages is in memory.
func residentBytes(t testing.TB, b []byte) (n int) {
	t.Helper()
	vec := make([]byte, (len(b)+systemPage-1)/systemPage)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, addressOf(b), uintptr(len(b)), addressOf(vec))
	require.Zero(t, errno)
	for _, v := range vec {
		n += int(v&1) * systemPage
	}
	return n
}
