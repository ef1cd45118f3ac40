package rdmanet

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// TestGuestSlowLink runs in two guests, between which vm/tests/slow-link makes a network of
// a megabyte a second. The one that dials writes, the other reads.
func TestGuestSlowLink(t *testing.T) {
	dev := os.Getenv("RDMANET_SLOW_LINK")
	if dev == "" {
		t.Skip("RDMANET_SLOW_LINK does not name the interface: vm/test runs this in two guests")
	}
	leaktest.Check(t)
	s := &slowGuest{T: t, dev: dev, p: alloc(t, 8<<20).Bytes()}
	modes := []bool{false, true}
	if os.Getenv("RDMANET_VM_ROLE") == "1" {
		lns := make([]net.Listener, len(modes))
		for i, noRead := range modes {
			lc := ListenConfig{Config: slowConfig(noRead)}
			ln, err := lc.Listen(tctx, "rdma4", net.JoinHostPort(host4, slowPort(noRead)))
			require.NoError(t, err)
			defer ln.Close()
			lns[i] = ln
		}
		for i := range modes {
			s.reads(lns[i])
		}
		return
	}
	for _, noRead := range modes {
		s.writes(noRead)
	}
}

type slowGuest struct {
	*testing.T
	dev string
	p   []byte
}

func slowConfig(noRead bool) Config {
	return Config{NoRDMARead: noRead, KeepAlive: 2 * time.Second, LingerTimeout: patience}
}

func slowPort(noRead bool) string {
	if noRead {
		return "7475"
	}
	return "7474"
}

// carried is what the interface has received or sent.
func (s *slowGuest) carried(direction string) int {
	b, err := os.ReadFile("/sys/class/net/" + s.dev + "/statistics/" + direction + "_bytes")
	require.NoError(s, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	require.NoError(s, err)
	return n
}

// ends has a call end when the interface has carried some bytes, and checks how many
// it carries until then.
func (s *slowGuest) ends(what, direction string, end func(time.Time) error, call chan result) {
	start := s.carried(direction)
	require.True(s, eventually(func() bool { return s.carried(direction)-start >= 800<<10 }))
	before, at := s.carried(direction), time.Now()
	require.NoError(s, end(past))
	var r result
	within(s, what, func() { r = <-call })
	more := s.carried(direction) - before
	s.Logf("%s: %d bytes, %v; %d bytes and %v after its deadline", what, r.n, r.err, more, time.Since(at))
	require.Less(s, r.n, len(s.p))
	require.Less(s, more, int(slowRate*deadlineBound/time.Second))
}

func (s *slowGuest) reads(ln net.Listener) {
	accept := func() *Conn {
		c, err := ln.Accept()
		require.NoError(s, err)
		return c.(*Conn)
	}
	b := make([]byte, len(s.p))
	into := func(c *Conn) chan result {
		done := make(chan result, 1)
		go func() {
			n, err := c.Read(b)
			done <- result{n, err}
		}()
		return done
	}
	c := accept()
	s.ends("Read", "rx", c.SetReadDeadline, into(c))
	require.NoError(s, c.Close())

	c = accept() // the writer gives up
	within(s, "Read", func() { <-into(c) })
	require.NoError(s, c.Close())

	c = accept()
	require.Equal(s, result{len(b), nil}, <-reading(c, b))
	_, err := c.Write([]byte("x"))
	require.NoError(s, err)
	require.NoError(s, c.Close())
}

func (s *slowGuest) writes(noRead bool) {
	dial := func() *Conn {
		deadline := time.Now().Add(patience)
		for {
			d := Dialer{Config: slowConfig(noRead), Timeout: 15 * time.Second}
			c, err := d.Dial("rdma4", net.JoinHostPort(os.Getenv("RDMANET_VM_PEER"), slowPort(noRead)))
			if err == nil {
				return c.(*Conn)
			}
			require.True(s, time.Now().Before(deadline), "%v", err)
			time.Sleep(100 * time.Millisecond)
		}
	}
	c := dial() // the reader gives up, and closes
	within(s, "Write", func() { <-writing(c, s.p) })
	c.Close()

	c = dial()
	s.ends("Write", "tx", c.SetWriteDeadline, writing(c, s.p))
	c.Close()

	// Keep-alive has nothing against 8 s of it.
	c = dial()
	start := time.Now()
	require.Equal(s, result{len(s.p), nil}, <-writing(c, s.p))
	s.Logf("%d bytes took %v", len(s.p), time.Since(start))
	require.Equal(s, result{1, nil}, <-reading(c, make([]byte, 1)))
	require.NoError(s, c.Close())
}
