package rdmanet

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

var lossyBytes = flag.Int("lossy-bytes", 16<<20, "how many `bytes` TestLossyLink sends each way")

const (
	// lossyKeepAlive leaves time for packets that are lost over and over.
	lossyKeepAlive = 6 * time.Second

	// lossyBound is what Config.KeepAlive promises for it.
	lossyBound = 2 * lossyKeepAlive

	// deviceBound is what rdmacore.Config promises of a RoCE device's retries by
	// themselves, four times what they should take.
	deviceBound = 16 * time.Second

	// lossySlack is for the two ends to meet, on processors that are emulated.
	lossySlack = 8 * time.Second

	// lossyPatience is how long it may take to connect.
	lossyPatience = time.Minute
)

// TestLossyLink runs in two guests, between which vm/tests/lossy-link makes a
// network that loses and delays packets, and cuts it when it is told so. The two
// programs do the same, but one dials, and the other listens and has the link cut.
func TestLossyLink(t *testing.T) {
	script := os.Getenv("RDMANET_LINK")
	if script == "" {
		t.Skip("RDMANET_LINK does not say how to cut the link: vm/test runs this in two guests")
	}
	leaktest.Check(t)
	l := &lossy{T: t, script: script, listens: os.Getenv("RDMANET_VM_ROLE") == "1"}
	if l.listens {
		defer l.listen(lossyKeepAlive)()
		defer l.listen(-1)()
	}
	l.transfer()
	l.cut("cut")
	l.cut("down")
	if overIWARP(t) { // Soft-RoCE takes no new connections when the link has been down
		after := l.connect("after", lossyKeepAlive)
		l.meet(after)
		require.NoError(t, after.Close())
	}
}

// lossy is one end.
type lossy struct {
	*testing.T
	script  string
	listens bool
	arrived chan arrival
	early   map[string]*Conn // arrived and not yet asked for
}

// arrival is a connection with the name that the dialling end gave it.
type arrival struct {
	name string
	c    *Conn
}

// lossyPort is that of connections with this interval, which a listener has only
// one of.
func lossyPort(keepAlive time.Duration) string {
	if keepAlive < 0 {
		return "7472"
	}
	return "7471"
}

// listen takes connections until the function that it returns is called.
func (l *lossy) listen(keepAlive time.Duration) (stop func()) {
	if l.arrived == nil {
		l.arrived, l.early = make(chan arrival, 16), make(map[string]*Conn)
	}
	lc := ListenConfig{Config: Config{KeepAlive: keepAlive}}
	ln, err := lc.Listen(tctx, "rdma4", net.JoinHostPort(host4, lossyPort(keepAlive)))
	require.NoError(l, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			// One that the other end has given up, while it was set up, says nothing.
			name := make([]byte, 16)
			c.SetReadDeadline(time.Now().Add(lossyPatience))
			if _, err := io.ReadFull(c, name); err != nil {
				l.Logf("accepted for nothing: %v", err)
				c.Close()
				continue
			}
			c.SetReadDeadline(time.Time{})
			l.arrived <- arrival{string(bytes.TrimRight(name, " ")), c.(*Conn)}
		}
	}()
	return func() {
		require.NoError(l, ln.Close())
		<-done
	}
}

// connect makes the connection of that name.
func (l *lossy) connect(name string, keepAlive time.Duration) *Conn {
	l.Helper()
	deadline := time.Now().Add(lossyPatience)
	if !l.listens {
		address := net.JoinHostPort(os.Getenv("RDMANET_VM_PEER"), lossyPort(keepAlive))
		for {
			d := Dialer{Config: Config{KeepAlive: keepAlive}, Timeout: 15 * time.Second}
			c, err := d.Dial("rdma4", address)
			if err == nil {
				_, err = fmt.Fprintf(c, "%-16s", name)
				require.NoError(l, err)
				return c.(*Conn)
			}
			require.True(l, time.Now().Before(deadline), "%v", err)
			time.Sleep(100 * time.Millisecond)
		}
	}
	timeout := time.After(time.Until(deadline))
	for l.early[name] == nil {
		select {
		case a := <-l.arrived:
			l.early[a.name] = a.c
		case <-timeout:
			l.Fatalf("connection %q does not arrive", name)
		}
	}
	return l.early[name]
}

// meet returns when both ends have called it, at the listening end, which cuts
// the link, when the other will return whatever becomes of the link.
func (l *lossy) meet(c *Conn) {
	l.Helper()
	for _, reads := range []bool{true, false, true} {
		pass1(l, c, reads == l.listens)
	}
}

// pass1 is one end of passing a byte.
func pass1(t testing.TB, c *Conn, reads bool) {
	t.Helper()
	var err error
	if reads {
		_, err = io.ReadFull(c, make([]byte, 1))
	} else {
		_, err = c.Write([]byte{1})
	}
	require.NoError(t, err)
}

// transfer sends bytes both ways at once, whose place tells what they are. An
// idle connection outlives that.
func (l *lossy) transfer() {
	start := time.Now()
	idle := l.connect("idle", lossyKeepAlive)
	c := l.connect("bulk", lossyKeepAlive)
	out, in := pattern(1, *lossyBytes), pattern(2, *lossyBytes)
	if l.listens {
		out, in = in, out
	}
	wrote := make(chan error, 1)
	go func() {
		n, err := c.Write(out)
		if err == nil && n < len(out) {
			err = io.ErrShortWrite
		}
		wrote <- errors.Join(err, c.CloseWrite())
	}()
	got := make([]byte, 64<<10)
	for at := 0; ; {
		n, err := c.Read(got)
		defect.Bytes(l, in[at:min(at+n, len(in))], got[:n], "from %d on", at)
		at += n
		if err != nil {
			require.Equal(l, io.EOF, err)
			if at < len(in) {
				l.Fatal(defect.Lost("the end came after %d of %d", at, len(in)))
			}
			break
		}
	}
	require.NoError(l, <-wrote)
	require.NoError(l, c.Close())
	l.meet(idle)
	st := idle.Stats()
	require.NoError(l, idle.Close())
	l.Logf("%d bytes each way: %.1f s; the idle connection has asked %d times", len(in), time.Since(start).Seconds(), st.KeepAliveSent)
}

// severed is how a call ended that the cut link was to end.
type severed struct {
	what  string // connection and call
	op    string
	err   error
	after time.Duration
	bound time.Duration
}

// cut has connections that are idle, that carry data, and on which both ends
// write and neither reads, and cuts the link. Over RoCE the device alone ends one
// that carries data, unless the link is down at its own end: Soft-RoCE does not
// count what it cannot send as tried.
func (l *lossy) cut(how string) {
	l.Helper()
	timed := map[string]time.Duration{"idle": lossyBound, "flows": lossyBound, "stalls": lossyBound}
	if !overIWARP(l) && how == "cut" {
		timed["device"] = deviceBound // carries a little all the time, without keep-alive
	}
	conns := make(map[string]*Conn)
	for _, name := range []string{"idle", "flows", "stalls", "device"} {
		if timed[name] == 0 {
			continue
		}
		keepAlive := lossyKeepAlive
		if name == "device" {
			keepAlive = -1
		}
		conns[name] = l.connect(how+" "+name, keepAlive)
	}
	ends := make(chan severed)
	var start time.Time
	calls := 0
	ended := make(chan struct{}) // may be read when start is set
	call := func(name, op string, f func() error) {
		calls++
		go func() {
			err := f()
			now := time.Now()
			<-ended
			ends <- severed{name, op, err, now.Sub(start), timed[name]}
		}()
	}
	for name, c := range conns {
		switch name {
		case "idle":
		case "stalls":
			call(name, "write", func() error { return flood(c) })
			require.Eventually(l, stalls(c), lossyPatience, 10*time.Millisecond)
		default:
			write := flood
			if name == "device" {
				write = trickle // which never lacks credits, and so has something on its way after the cut
			}
			call(name, "read", func() error { return drain(c) })
			call(name, "write", func() error { return write(c) })
			require.Eventually(l, func() bool { return c.Stats().BytesReceived > 0 }, lossyPatience, 10*time.Millisecond)
		}
	}
	l.meet(conns["idle"])
	start = time.Now()
	close(ended)
	call("idle", "read", func() error { return drain(conns["idle"]) })
	if l.listens {
		l.link(how)
	}
	for range calls {
		s := <-ends
		l.Logf("%s, %s: %s after %.1f s: %v", how, s.what, s.op, s.after.Seconds(), s.err)
		l.requireSevered(s)
	}
	// Who calls later hears of it too, and at once.
	for name, c := range conns {
		for op, f := range map[string]func(net.Conn) error{"read": drain, "write": flood} {
			start := time.Now()
			err := f(c)
			l.requireSevered(severed{name, op, err, time.Since(start), 0})
		}
		require.NoError(l, c.Close())
	}
	if l.listens {
		l.link("mend")
	}
}

// stalls returns a function that reports whether writers wait for the reader of the other end.
// Without credits nothing tells but that no byte was taken for long, as the network goes.
func stalls(c *Conn) func() bool {
	const long = time.Second
	var sent uint64
	var since time.Time
	return func() bool {
		s := c.Stats()
		if !c.Info().Extensions.HeldSends {
			return s.CreditStalls > 0
		}
		if s.BytesSent != sent {
			sent, since = s.BytesSent, time.Now()
		}
		return sent > 0 && time.Since(since) > long
	}
}

// link has the script do something to the network.
func (l *lossy) link(what string) {
	l.Helper()
	out, err := exec.Command(l.script, what).CombinedOutput()
	require.NoError(l, err, "%s", out)
}

// flood writes until an error.
func flood(c net.Conn) error {
	for b := make([]byte, 10000); ; {
		if _, err := c.Write(b); err != nil {
			return err
		}
	}
}

// trickle does so slowly.
func trickle(c net.Conn) error {
	for {
		if _, err := c.Write([]byte("a little")); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (l *lossy) requireSevered(s severed) {
	l.Helper()
	var op *net.OpError
	require.ErrorAs(l, s.err, &op, "%s", s.what)
	require.Equal(l, s.op, op.Op)
	require.Equal(l, "rdma", op.Net)
	require.True(l, errors.Is(s.err, syscall.ETIMEDOUT) || errors.Is(s.err, syscall.ECONNRESET), "%s: %v", s.what, s.err)
	require.Equal(l, errors.Is(s.err, syscall.ETIMEDOUT), op.Timeout(), "%s: %v", s.what, s.err)
	require.Less(l, s.after, s.bound+lossySlack, "%s: %s", s.what, s.op)
}
