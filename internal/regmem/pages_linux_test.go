package regmem

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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
// is; Memory that is as large as a huge page may have such.
func TestPageSizes(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		t.Skip("this kernel has no transparent huge pages, and tells nothing of them")
	}
	checkLeaks(t)
	for _, huge := range []bool{false, true} {
		sw := newSwitch(t, nil)
		dom := acquire(t, sw)
		was := AdviseHuge
		AdviseHuge = huge
		chunk := dom.GetChunk(100 * ChunkSize)
		buffer, err := dom.Pool(1000).Get()
		small, large := alloc(t, 100), alloc(t, hugeSpan-PageSize)
		AdviseHuge = was
		require.NotNil(t, chunk)
		require.NoError(t, err)
		for name, mem := range map[string][]byte{
			"a slab": buffer.slab.mem, "a chunk": chunk.B, "small Memory": small.b, "Memory": large.b,
		} {
			require.Contains(t, strings.Fields(mappingOf(t, mem)["VmFlags"]), "nh", name)
		}
		flags := strings.Fields(mappingOf(t, alloc(t, 2*hugeSpan).b)["VmFlags"])
		require.Contains(t, flags, "hg")
		require.NotContains(t, flags, "nh")
		buffer.Release()
		chunk.Release()
		require.NoError(t, dom.Release())
	}
}
