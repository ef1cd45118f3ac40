package rdmanet

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

var kills = flag.Int("kills", 20, "how `often` TestKilledPeer kills its peer")

// victimEnv makes the test binary the peer of TestKilledPeer: it says what to do,
// a victim's name, and to which address.
const victimEnv = "RDMANET_VICTIM"

const victimConns = 2 // at a time

// The victims. Each goes on until it is killed.
var victims = map[string]func(address string) error{
	"dials":   func(address string) error { return victimConn(address, chatter) },
	"reads":   func(address string) error { return victimConn(address, func(c net.Conn) error { return drain(c) }) },
	"idles":   func(address string) error { return victimConn(address, func(net.Conn) error { select {} }) },
	"churns":  churn,
	"writes":  func(address string) error { return victimConn(address, writeMessages) },
	"echoes":  echo,
	"listens": func(string) error { return victimListener() },
	"sinks":   func(string) error { return sink() },
}

// victimConn dials and uses the connection.
func victimConn(address string, use func(net.Conn) error) error {
	c, err := Dial("rdma", address)
	if err != nil {
		return err
	}
	return use(c)
}

// churn sets up connections and closes them.
func churn(address string) error {
	for {
		c, err := Dial("rdma", address)
		if err != nil {
			return err
		}
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		if err := c.Close(); err != nil {
			return err
		}
	}
}

// echo sends back what comes. The peer may send more than a socket takes that nobody reads.
func echo(address string) error {
	c, err := (&Dialer{Config: Config{InitialReceiveCredits: 128}}).Dial("rdma", address)
	if err != nil {
		return err
	}
	io.Copy(c, c)
	select {}
}

// listenAndPrint listens, and prints the address for the process that has started this one.
func listenAndPrint() (net.Listener, error) {
	ln, err := Listen("rdma4", local4)
	if err == nil {
		fmt.Println(ln.Addr())
	}
	return ln, err
}

// victimListener prints its address and uses what comes in.
func victimListener() error {
	ln, err := listenAndPrint()
	if err != nil {
		return err
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go chatter(c)
	}
}

// sink prints its address, and reads a part of what comes in.
func sink() error {
	ln, err := listenAndPrint()
	if err != nil {
		return err
	}
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	io.ReadFull(c, make([]byte, victimMessage))
	<-make(chan bool)
	runtime.KeepAlive(c) // what is dropped is closed
	runtime.KeepAlive(ln)
	return nil
}

// chatter reads and writes until an error ends both, and returns the two.
func chatter(c net.Conn) error {
	wrote := make(chan error, 1)
	go func() {
		for b := make([]byte, 10000); ; {
			if _, err := c.Write(b); err != nil {
				wrote <- err
				return
			}
		}
	}()
	return errors.Join(drain(c), <-wrote)
}

// drain reads until an error.
func drain(c net.Conn) error {
	for b := make([]byte, 10000); ; {
		if _, err := c.Read(b); err != nil {
			return err
		}
	}
}

// beVictim is what the second process does. It ends with the first one.
func beVictim(what string) {
	name, address, _ := strings.Cut(what, " ")
	errs := make(chan error)
	for range victimConns {
		go func() { errs <- victims[name](address) }()
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	fmt.Fprintln(os.Stderr, "victim:", <-errs)
	os.Exit(1)
}

// killed is one process with the connections to it.
type killed struct {
	t   *testing.T
	cmd *exec.Cmd
	out *bufio.Reader
	in  io.Closer
}

func startVictim(t *testing.T, what string) *killed {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	v := &killed{t: t, cmd: exec.Command(exe, "-test.run=^TestKilledPeer$")}
	v.cmd.Env = append(os.Environ(), victimEnv+"="+what)
	v.cmd.Stderr = os.Stderr
	v.in, err = v.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := v.cmd.StdoutPipe()
	require.NoError(t, err)
	v.out = bufio.NewReader(out)
	require.NoError(t, v.cmd.Start())
	return v
}

// kill gives the process no chance to say anything.
func (v *killed) kill() {
	v.t.Helper()
	require.NoError(v.t, v.cmd.Process.Kill())
	err := v.cmd.Wait()
	var exit *exec.ExitError
	require.ErrorAs(v.t, err, &exit)
	require.False(v.t, exit.Exited(), "it ended before it was killed: %v", err)
	v.in.Close()
}

// requirePeerGone checks an error of a connection whose peer was killed: a reset,
// a broken pipe or the end of the stream, in net's shape.
func requirePeerGone(t *testing.T, err error) {
	t.Helper()
	if err == io.EOF {
		return
	}
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	require.False(t, op.Timeout(), "%v", err)
	require.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE), "%v", err)
}

// When a peer's process is killed, at whatever moment, each connection to it ends
// with a reset or the end of the stream, others go on, and nothing is left.
func TestKilledPeer(t *testing.T) {
	if what := os.Getenv(victimEnv); what != "" {
		beVictim(what)
	}
	leaktest.Check(t)
	sw := newSwitch(t, nil)
	cfg := Config{Provider: sw}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	bystander, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
	require.NoError(t, err)
	defer bystander.Close()
	beside, err := ln.Accept()
	require.NoError(t, err)
	defer beside.Close()
	before := sw.Live()

	type ended struct{ use, close error }
	var open atomic.Int32
	ends := make(chan ended, 10000)
	first := make(chan struct{}, 1) // is told that there is a connection
	use := func(c net.Conn) {
		open.Add(1)
		select {
		case first <- struct{}{}:
		default:
		}
		go func() {
			use := chatter(c)
			ends <- ended{use, c.Close()}
			open.Add(-1)
		}()
	}
	accepting := make(chan struct{})
	go func() {
		defer close(accepting)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			use(c)
		}
	}()
	names := []string{"dials", "listens", "reads", "churns", "idles"}
	times := *kills
	if testing.Short() {
		times = len(names)
	}
	for n := range times {
		name := names[n%len(names)]
		v := startVictim(t, name+" "+ln.Addr().String())
		if name == "listens" {
			address, err := v.out.ReadString('\n')
			require.NoError(t, err)
			for range victimConns {
				c, err := (&Dialer{Config: cfg}).Dial("rdma4", strings.TrimSpace(address))
				require.NoError(t, err)
				use(c)
			}
		}
		<-first
		time.Sleep(rand.N(20 * time.Millisecond))
		v.kill()
		pass(t, bystander, beside)
		pass(t, beside, bystander)
		over := eventually(func() bool {
			live := sw.Live()
			return live["QP"] == before["QP"] && live["ID"] == before["ID"] && open.Load() == 0
		})
		if !over {
			defect.Leak(t, "%d connections to one that %s are left, %v where there were %v\n\n%s",
				open.Load(), name, sw.Live(), before, stacks())
			t.FailNow()
		}
		select {
		case <-first:
		default:
		}
		for len(ends) > 0 {
			e := <-ends
			for _, err := range e.use.(interface{ Unwrap() []error }).Unwrap() {
				requirePeerGone(t, err)
			}
			require.NoError(t, e.close)
		}
	}
	require.NoError(t, ln.Close())
	<-accepting
	require.NoError(t, bystander.Close())
	require.NoError(t, beside.Close())
}
