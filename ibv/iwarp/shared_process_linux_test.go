//go:build amd64 || arm64

package iwarp

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

var (
	sharedKills  = flag.Int("shared.kills", 20, "how `often` TestKilledSharedPeer kills its peer")
	scribbleTime = flag.Duration("shared.scribble", 2*time.Second, "how `long` TestScribblingProcess lasts")
)

// childEnv makes the test binary a second process: it has the child's role and its arguments.
const childEnv = "RDMANET_IWARP_CHILD"

// children has the roles. A child ends with its first process, when its role returns.
var children = map[string]func(t *testing.T, args []string) error{
	"dials": func(t *testing.T, args []string) error {
		addr := netip.MustParseAddrPort(args[0])
		fmt.Println("dials")
		_, err := dialAndTalk(New(Config{SameHost: SameHostOn}), addr, nil)
		return err
	},
	"listens": func(t *testing.T, args []string) error {
		p := New(Config{SameHost: SameHostOn})
		ln, err := p.Listen(context.Background(), netip.MustParseAddrPort(args[0]), 0)
		if err != nil {
			return err
		}
		fmt.Println(ln.Addr())
		for {
			id, err := ln.Accept(context.Background())
			if err != nil {
				return err
			}
			go acceptAndTalk(p, id)
		}
	},
	"identifies": func(t *testing.T, args []string) error {
		id, err := hostID()
		fmt.Println(hex.EncodeToString(id[:]))
		return err
	},
	"visits": func(t *testing.T, args []string) error {
		var a iwarpwire.SameHostAnswer
		hex.Decode(a.Name[:], []byte(args[0]))
		hex.Decode(a.Token[:], []byte(args[1]))
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: socketName(a.Name)})
		if err != nil {
			fmt.Println("no connection:", err)
			return nil
		}
		conn.SetDeadline(time.Now().Add(patience))
		// The device may have closed the socket before this is sent.
		conn.WriteMsgUnix(helloOf(a.Token), unix.UnixRights(goodVisit(t)...), nil)
		if fd, err := readReply(conn); err == nil {
			fmt.Println("page", fd)
		} else {
			fmt.Println("no page:", err)
		}
		return nil
	},
	"leaves": func(t *testing.T, args []string) error {
		for range 2 * maxVisitors {
			fd := slowToClose(t)
			// What the device has closed already closes for the last time with this process.
			if conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: args[0]}); err == nil {
				writeHello(conn, []byte{0}, fd)
				conn.Close()
			}
			go unix.Close(fd)
		}
		fmt.Println("left")
		select {} // until stop
	},
	"hosts": func(t *testing.T, args []string) error {
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: args[0]})
		if err != nil {
			return err
		}
		fmt.Println("hosts")
		for {
			conn, err := ln.AcceptUnix()
			if err != nil {
				return err
			}
			n, _ := conn.Read(make([]byte, 1))
			fmt.Println("bytes:", n)
		}
	},
	"scribbles": func(t *testing.T, args []string) error {
		d, err := time.ParseDuration(args[1])
		if err != nil {
			return err
		}
		s := &site{t: t, p: New(Config{SameHost: SameHostOn})}
		rnd := rand.New(rand.NewPCG(rand.Uint64(), 1))
		for end := time.Now().Add(d); time.Now().Before(end); {
			p := &ringPeer{rawPeer: dialRaw(t, netip.MustParseAddrPort(args[0]))}
			now := rnd.IntN(4) == 0
			p.send(s.sharedRequest(p.rawPeer, now))
			_, a, ok := iwarpwire.CutSameHostAnswer(p.start(true).Private)
			if !ok {
				return errors.New("no answer")
			}
			p.visit(a)
			if !now {
				p.put(rtrFrame(false))
			}
			p.move()
			(&scribbler{p: p, rnd: rnd, mode: rnd.IntN(4)}).scribble(rnd.IntN(20000))
			p.free()
		}
		return nil
	},
}

// A test binary with a role is the child of one of the tests below.
func TestChildProcess(t *testing.T) {
	what := strings.Fields(os.Getenv(childEnv))
	if len(what) == 0 {
		t.Skip("this is the first process")
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	if err := children[what[0]](t, what[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(1)
	}
}

// A child is the second process.
type child struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.Closer
	out *bufio.Reader
}

// startChild starts the test binary with a role. attr may be nil.
func startChild(t *testing.T, attr *syscall.SysProcAttr, role ...string) *child {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	if attr != nil && attr.Credential != nil {
		exe = copyForAll(t, exe)
	}
	c := &child{t: t, cmd: exec.Command(exe, "-test.run=^TestChildProcess$", "-test.timeout=0")}
	c.cmd.Env = append(os.Environ(), childEnv+"="+strings.Join(role, " "))
	c.cmd.Dir, c.cmd.SysProcAttr, c.cmd.Stderr = "/", attr, os.Stderr
	c.in, err = c.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		c.in.Close()
		out.Close()
		t.Skip("such a process cannot be started here: ", err)
	}
	return c
}

// copyForAll returns a copy of a program that every user may run.
func copyForAll(t *testing.T, exe string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "rdmanet")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	b, err := os.ReadFile(exe)
	require.NoError(t, err)
	exe = filepath.Join(dir, "test")
	require.NoError(t, os.WriteFile(exe, b, 0o755))
	return exe
}

func (c *child) line() string {
	c.t.Helper()
	s, err := c.out.ReadString('\n')
	require.NoError(c.t, err)
	return strings.TrimSpace(s)
}

// kill gives the process no chance to say anything. It returns the time at which it was
// killed.
func (c *child) kill() time.Time {
	c.t.Helper()
	at := time.Now()
	require.NoError(c.t, c.cmd.Process.Kill())
	return at
}

// killed waits for the end of a process that was killed.
func (c *child) killed() {
	c.t.Helper()
	io.Copy(io.Discard, c.out)
	var exit *exec.ExitError
	require.ErrorAs(c.t, c.cmd.Wait(), &exit)
	require.False(c.t, exit.Exited(), "it has ended before it was killed")
	c.in.Close()
}

// stop ends the process.
func (c *child) stop() {
	c.in.Close()
	io.Copy(io.Discard, c.out)
	c.cmd.Wait()
}

// talkSize bounds the messages of a talker.
const talkSize = 16 << 10

// talk exchanges messages of random sizes until the connection ends, and returns the error.
// first is set for the end that begins, with several messages at a time.
func talk(p *Provider, id ibv.ID, set func(qp ibv.QP) error, first bool, each func()) (err error) {
	const receives = 8
	pd, err := p.dev.AllocPD()
	if err != nil {
		return err
	}
	buf := make([]byte, receives*talkSize)
	mr, err := pd.RegMR(buf, ibv.AccessLocalWrite)
	if err != nil {
		return err
	}
	cq, err := p.dev.CreateCQ(256)
	if err != nil {
		return err
	}
	qp, err := id.CreateQP(pd, ibv.QPInit{SendCQ: cq, RecvCQ: cq, Cap: ibv.QPCap{MaxSendWR: 64, MaxRecvWR: receives, MaxSendSGE: 1, MaxRecvSGE: 1}})
	if err != nil {
		return err
	}
	defer func() {
		for _, c := range []io.Closer{qp, cq, id, mr, pd} {
			if cerr := c.Close(); cerr != nil {
				err = fmt.Errorf("close after %w: %w", err, cerr)
			}
		}
	}()
	receive := func(i uint64) error {
		_, err := qp.PostRecv([]ibv.RecvWR{{ID: i, SGL: []ibv.SGE{{Buf: buf[i*talkSize:][:talkSize], LKey: mr.LKey()}}}})
		return err
	}
	for i := range uint64(receives) {
		if err := receive(i); err != nil {
			return err
		}
	}
	send := func() error {
		b := make([]byte, 1+rand.IntN(talkSize)>>rand.IntN(14))
		_, err := qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: b}}}})
		return err
	}
	if err := set(qp); err != nil {
		return err
	}
	if first {
		for range receives / 2 {
			if err := send(); err != nil {
				return err
			}
		}
	}
	for {
		if err := cq.Arm(false); err != nil {
			return err
		}
		var wcs [16]ibv.WC
		k, err := cq.Poll(wcs[:])
		if err != nil {
			return err
		}
		for _, wc := range wcs[:k] {
			if wc.Status != ibv.WCSuccess {
				return errTalkOver
			}
			if err := errors.Join(receive(wc.ID), send()); err != nil {
				if qp.State() != ibv.QPSRTS {
					return errTalkOver
				}
				return err
			}
		}
		if each != nil {
			each()
		}
		if k == 0 {
			if err := cq.Wait(time.Now().Add(patience)); err != nil {
				return err
			}
		}
	}
}

// errTalkOver is how a talk ends whose peer has gone.
var errTalkOver = errors.New("the connection has ended")

// dialAndTalk returns the link that the connection had.
func dialAndTalk(p *Provider, addr netip.AddrPort, each func(id ibv.ID)) (link string, err error) {
	id, err := p.Resolve(context.Background(), netip.AddrPort{}, addr)
	if err != nil {
		return "", err
	}
	err = talk(p, id, func(ibv.QP) error {
		return id.Connect(context.Background(), ibv.ConnParam{Private: fmt.Append(nil, os.Getpid())})
	}, true, func() {
		link, _ = id.(ibv.Linker).Link()
		if each != nil {
			each(id)
		}
	})
	return link, err
}

func acceptAndTalk(p *Provider, id ibv.ID) (link string, err error) {
	err = talk(p, id, func(ibv.QP) error { return id.Accept(context.Background(), ibv.ConnParam{}) }, false,
		func() { link, _ = id.(ibv.Linker).Link() })
	return link, err
}

// When a peer's process is killed, at whatever moment, its connection ends soon, others go on
// and nothing is left.
func TestKilledSharedPeer(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	good := s.bystander()
	kills := make(map[string]time.Time) // kills is by process.
	type end struct {
		pid, link   string
		begin, over time.Time
		err         error
	}
	var mu sync.Mutex
	var ends []end
	note := func(e end) {
		mu.Lock()
		ends = append(ends, e)
		mu.Unlock()
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			id, err := s.ln.Accept(ctx)
			if err != nil {
				return
			}
			begin := time.Now()
			serving.Go(func() {
				pid := string(id.PrivateData())
				link, err := acceptAndTalk(s.p, id)
				note(end{pid, link, begin, time.Now(), err})
			})
		}
	})
	for i := range *sharedKills {
		pause := rand.N(100 * time.Millisecond)
		if i%4 < 2 {
			pause = rand.N(3 * time.Millisecond) // The connection is being set up, or moves.
		}
		if i%2 == 0 {
			c := startChild(t, nil, "dials", s.ln.Addr().String())
			require.Equal(t, "dials", c.line())
			time.Sleep(pause) // This is the moment of the kill, and nothing is waited for.
			kills[strconv.Itoa(c.cmd.Process.Pid)] = c.kill()
			c.killed()
			continue
		}
		c := startChild(t, nil, "listens", loopback.String())
		addr := netip.MustParseAddrPort(c.line())
		pid := strconv.Itoa(c.cmd.Process.Pid)
		over := make(chan struct{})
		begin := time.Now()
		go func() {
			defer close(over)
			link, err := dialAndTalk(s.p, addr, nil)
			note(end{pid, link, begin, time.Now(), err})
		}()
		time.Sleep(pause)
		kills[pid] = c.kill()
		c.killed()
		<-over
	}
	good.check()
	good.close()
	// Those that were accepted last may still be noticing it.
	cancel()
	serving.Wait()
	var late []time.Duration
	shared := 0
	for _, e := range ends {
		at, ok := kills[e.pid]
		require.True(t, ok, "a connection of nobody: %q", e.pid)
		require.False(t, e.over.Before(at), "a connection has ended before the kill: %v", e.err)
		if e.link != "" && !errors.Is(e.err, errTalkOver) {
			require.NoError(t, e.err)
		}
		if e.begin.After(at) {
			at = e.begin
		}
		late = append(late, e.over.Sub(at))
		if e.link == "shared memory" {
			shared++
		}
	}
	if len(late) == 0 {
		t.Skip("no connection was made before a kill")
	}
	slices.Sort(late)
	t.Logf("%d kills, %d connections, of which %d in shared memory; they ended after %v (median), %v (most)",
		*sharedKills, len(late), shared, late[len(late)/2], late[len(late)-1])
	require.Less(t, late[len(late)-1], 2*time.Second)
}

// Two processes of a host, a user and a network namespace share memory.
func TestTwoProcessesShare(t *testing.T) {
	nothingLeft(t)
	c := startChild(t, nil, "listens", loopback.String())
	link := ""
	dialAndTalk(New(Config{SameHost: SameHostOn}), netip.MustParseAddrPort(c.line()), func(id ibv.ID) {
		if link, _ = id.(ibv.Linker).Link(); link == "shared memory" {
			c.in.Close() // This ends the child.
		}
	})
	require.Equal(t, "shared memory", link)
	c.stop()
}

// A process writes anything over the memory that it shares, on many connections.
func TestScribblingProcess(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	good := s.bystander()
	c := startChild(t, nil, "scribbles", s.ln.Addr().String(), scribbleTime.String())
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error, 1)
	go func() {
		io.Copy(io.Discard, c.out)
		over <- c.cmd.Wait()
		cancel()
	}()
	n := 0
	for {
		id, err := s.ln.Accept(ctx)
		if err != nil {
			break
		}
		n++
		mem := newMemory(t, s.p)
		mem.pin()
		v := newVictim(t, id, mem, 4)
		if id.Accept(context.Background(), depths) == nil {
			p := &ringPeer{rawPeer: &rawPeer{t: t}, v: v}
			for range 10 {
				v.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: bytesOf(500)}}}})
			}
			p.v.event()
		}
		v.close()
		mem.touched()
		mem.close()
	}
	require.NoError(t, <-over)
	c.in.Close()
	t.Log(n, "connections")
	good.check()
	good.close()
}

// nobody is another user.
func nobody() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
}

// otherNamespace is another network namespace.
func otherNamespace() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
}

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can make such a process")
	}
}

// Processes have the identity of the host in common if they may share memory.
func TestHostID(t *testing.T) {
	requireRoot(t)
	nothingLeft(t)
	here, err := hostID()
	require.NoError(t, err)
	seen := map[string]string{}
	for name, attr := range map[string]*syscall.SysProcAttr{"the same": nil, "user": nobody(), "namespace": otherNamespace()} {
		t.Run(name, func(t *testing.T) {
			c := startChild(t, attr, "identifies")
			defer c.stop()
			id := c.line()
			require.Equal(t, name == "the same", hex.EncodeToString(here[:]) == id)
			require.NotContains(t, seen, id)
			seen[id] = name
		})
	}
}

// A process of another user has its connections over TCP, in both roles.
func TestAnotherUser(t *testing.T) {
	requireRoot(t)
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	c := startChild(t, nobody(), "dials", s.ln.Addr().String())
	require.Equal(t, "dials", c.line())
	id := s.accept()
	messages := 0
	err := talk(s.p, id, func(ibv.QP) error { return id.Accept(context.Background(), ibv.ConnParam{}) }, false, func() {
		if messages++; messages == 200 {
			link, reason := id.(ibv.Linker).Link()
			require.Equal(t, "tcp", link)
			require.Equal(t, errSharedHost.Error(), reason)
			c.kill()
		}
	})
	require.ErrorIs(t, err, errTalkOver)
	c.killed()

	c = startChild(t, nobody(), "listens", loopback.String())
	messages = 0
	_, err = dialAndTalk(s.p, netip.MustParseAddrPort(c.line()), func(id ibv.ID) {
		if messages++; messages == 200 {
			link, reason := id.(ibv.Linker).Link()
			require.Equal(t, "tcp", link)
			require.Equal(t, errSharedAnswer.Error(), reason)
			c.kill()
		}
	})
	require.ErrorIs(t, err, errTalkOver)
	c.killed()
}

// A process of another user, or of another network namespace, gets no page at the Unix socket,
// although it knows the token.
func TestStrangerWithToken(t *testing.T) {
	requireRoot(t)
	for name, tt := range map[string]struct {
		attr *syscall.SysProcAttr
		want string
	}{"user": {nobody(), "no page: "}, "namespace": {otherNamespace(), "no connection: "}} {
		t.Run(name, func(t *testing.T) {
			nothingLeft(t)
			s := newSite(t, Config{SameHost: SameHostOn})
			b, a := s.guest()
			c := startChild(t, tt.attr, "visits", hex.EncodeToString(a.Name[:]), hex.EncodeToString(a.Token[:]))
			require.Contains(t, c.line(), tt.want)
			c.stop()
			requireTCP(t, b, "")
			b.close()
		})
	}
}

// The Unix socket of the answer may belong to another user, who gets no page.
func TestSocketOfAnotherUser(t *testing.T) {
	requireRoot(t)
	nothingLeft(t)
	s := &site{t: t, p: New(Config{SameHost: SameHostOn})}
	h := newHost(t, false)
	h.unix.Close()
	c := startChild(t, nobody(), "hosts", socketName(h.answer.Name))
	require.Equal(t, "hosts", c.line())
	b := h.guest(s.p)
	for range 2 * moveAfterWrites {
		b.check()
	}
	require.Equal(t, "bytes: 0", c.line())
	requireEarlyOver(t, b.v)
	requireTCP(t, b, "another user")
	c.stop()
	b.close()
}

// Two processes in network namespaces that a link joins use TCP.
func TestNetworkNamespaces(t *testing.T) {
	requireRoot(t)
	nothingLeft(t)
	c := startChild(t, otherNamespace(), "listens", "0.0.0.0:0")
	defer c.stop()
	addr := netip.MustParseAddrPort(c.line())
	pid := strconv.Itoa(c.cmd.Process.Pid)
	name := "rd" + pid
	run := func(args ...string) error {
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%v: %w: %s", args, err, out)
		}
		return err
	}
	if err := run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", pid); err != nil {
		t.Skip("network namespaces cannot be joined here: ", err)
	}
	t.Cleanup(func() { run("ip", "link", "del", name) }) // It may have gone with the namespace.
	require.NoError(t, run("ip", "addr", "add", "198.18.231.1/30", "dev", name))
	require.NoError(t, run("ip", "link", "set", name, "up"))
	require.NoError(t, run("nsenter", "-t", pid, "-n", "ip", "addr", "add", "198.18.231.2/30", "dev", "eth0"))
	require.NoError(t, run("nsenter", "-t", pid, "-n", "ip", "link", "set", "eth0", "up"))
	messages := 0
	_, err := dialAndTalk(New(Config{SameHost: SameHostOn}), netip.AddrPortFrom(netip.MustParseAddr("198.18.231.2"), addr.Port()), func(id ibv.ID) {
		if messages++; messages == 200 {
			link, reason := id.(ibv.Linker).Link()
			require.Equal(t, "tcp", link)
			require.Equal(t, errSharedRemote.Error(), reason)
			c.in.Close()
		}
	})
	require.ErrorIs(t, err, errTalkOver)
}
