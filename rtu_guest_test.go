package rdmanet

import (
	"io"
	"net"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// TestGuestLostRTU runs in two guests. The one that dials writes and closes at once; the CM
// never tells the other one that it is connected, as vm/tests/lost-rtu drops that message.
// All that was written arrives all the same.
func TestGuestLostRTU(t *testing.T) {
	if os.Getenv("RDMANET_LOST_RTU") == "" {
		t.Skip("RDMANET_LOST_RTU is not set: vm/test runs this in two guests")
	}
	leaktest.Check(t)
	const conns, port = 10, "7476"
	length := func(i int) int { return 1 + i*1000 }
	if os.Getenv("RDMANET_VM_ROLE") == "1" {
		ln, err := Listen("rdma4", net.JoinHostPort(host4, port))
		require.NoError(t, err)
		defer ln.Close()
		var lengths []int // connections may come in any order
		for range conns {
			within(t, "a connection", func() {
				c, err := ln.Accept()
				require.NoError(t, err)
				defer c.Close()
				b, err := io.ReadAll(c)
				require.NoError(t, err)
				defect.Bytes(t, patternOf(len(b)), b)
				lengths = append(lengths, len(b))
			})
		}
		slices.Sort(lengths)
		for i, n := range lengths {
			if n != length(i) {
				t.Fatal(defect.Lost("%d of %d came on a connection", n, length(i)))
			}
		}
		return
	}
	for i := range conns {
		var c net.Conn
		require.True(t, eventually(func() (ok bool) { // the other guest may not listen yet
			var err error
			c, err = Dial("rdma4", net.JoinHostPort(os.Getenv("RDMANET_VM_PEER"), port))
			return err == nil
		}))
		_, err := c.Write(patternOf(length(i)))
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	require.True(t, eventually(func() bool { return Lingering().Now == 0 })) // their queue pairs are the process's
}
