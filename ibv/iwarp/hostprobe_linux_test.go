package iwarp

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// socketPair returns the two ends of a TCP connection of this host.
func socketPair(t *testing.T) (a, b *socket) {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	dialled, err := net.Dial("tcp4", ln.Addr().String())
	require.NoError(t, err)
	accepted, err := ln.Accept()
	require.NoError(t, err)
	a, b = new(socket), new(socket)
	require.NoError(t, a.init(dialled))
	require.NoError(t, b.init(accepted))
	t.Cleanup(func() {
		a.close(true)
		b.close(true)
	})
	return a, b
}

// The kernel gets times that it can keep, in which it asks several times.
func TestProbeHostTimes(t *testing.T) {
	for _, tt := range []struct {
		idle, patience       time.Duration
		secs, interval, asks int
	}{
		{time.Second, time.Second, 1, 1, 1},
		{time.Millisecond, time.Millisecond, 1, 1, 1},
		{1900 * time.Millisecond, 3900 * time.Millisecond, 1, 1, 3},
		{7 * time.Second, 7 * time.Second, 7, 1, 7},
		{2 * time.Minute, 20 * time.Second, 120, 5, 4},
		{1000 * time.Hour, 20 * time.Second, 32767, 5, 4},
	} {
		t.Run(fmt.Sprint(tt.idle, tt.patience), func(t *testing.T) {
			a, _ := socketPair(t)
			require.True(t, a.probeHost(tt.idle, tt.patience))
			for option, want := range map[[2]int]int{
				{unix.SOL_SOCKET, unix.SO_KEEPALIVE}:      1,
				{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE}:     tt.secs,
				{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL}:    tt.interval,
				{unix.IPPROTO_TCP, unix.TCP_KEEPCNT}:      tt.asks,
				{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT}: 0,
			} {
				var got int
				a.raw.Control(func(fd uintptr) { got, _ = unix.GetsockoptInt(int(fd), option[0], option[1]) })
				require.Equal(t, want, got, "option %v", option)
			}
		})
	}
}

// A peer that does not read owes nothing, although its window is closed: its kernel answers.
func TestHostHeardClosedWindow(t *testing.T) {
	a, _ := socketPair(t)
	require.True(t, a.probeHost(time.Second, 3*time.Second))
	a.conn.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	for b := make([]byte, 1<<20); ; {
		if _, err := a.conn.Write(b); err != nil {
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
			break
		}
	}
	require.Positive(t, a.unsent(), "the window is open")
	// The intervals at which Linux asks double, from some 0.2 s on.
	answers := 0
	for last, end := time.Duration(0), time.Now().Add(time.Minute); answers < 3; time.Sleep(10 * time.Millisecond) {
		ago, owes := a.hostHeard()
		require.False(t, owes, "%v after the last answer", ago)
		if ago < last {
			answers++
		}
		last = ago
		require.True(t, time.Now().Before(end), "the kernel does not ask, or nobody answers")
	}
}

// goneEnv makes the test binary the program of TestHostGone, in a network of its own.
const goneEnv = "RDMANET_HOST_GONE"

// A host that cannot be reached any more is noticed, by the kernel where it is asked, and by
// what it owes where something was sent.
func TestHostGone(t *testing.T) {
	if os.Getenv(goneEnv) != "" {
		hostGone(t)
		return
	}
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHostGone$", "-test.v")
	cmd.Env = append(os.Environ(), goneEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if _, exited := err.(*exec.ExitError); err != nil && !exited || strings.Contains(string(out), "--- SKIP") {
		t.Skipf("this system does not let a test have a network of its own: %v\n%s", err, out)
	}
	require.NoError(t, err, "%s", out)
}

func hostGone(t *testing.T) {
	if err := setLoopback(true); err == unix.EPERM {
		t.Skip(err)
	} else {
		require.NoError(t, err)
	}
	idle, _ := socketPair(t)
	busy := map[string]*socket{}
	for _, name := range []string{"data", "end"} {
		s, peer := socketPair(t)
		require.True(t, s.probeHost(time.Second, 3*time.Second))
		_, err := s.conn.Write([]byte("x"))
		require.NoError(t, err)
		_, err = peer.conn.Read(make([]byte, 1))
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			_, owes := s.hostHeard()
			return !owes
		}, time.Minute, time.Millisecond)
		busy[name] = s
	}
	require.True(t, idle.probeHost(time.Second, 3*time.Second))

	require.NoError(t, setLoopback(false))
	_, err := busy["data"].conn.Write([]byte("x"))
	require.NoError(t, err)
	require.NoError(t, busy["end"].closeWrite())
	for name, s := range busy {
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			ago, owes := s.hostHeard()
			if owes && ago >= 4*time.Second { // Nothing but that ends the connection for minutes.
				break
			}
			require.True(t, time.Now().Before(end), "%s: silent for %v, owes %v", name, ago, owes)
		}
	}
	idle.setReadDeadline(time.Now().Add(time.Minute))
	_, err = idle.conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
}

// setLoopback switches this network's only device.
func setLoopback(up bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if up {
		ifr.SetUint16(unix.IFF_UP)
	}
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}
