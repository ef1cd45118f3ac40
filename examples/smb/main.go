// Command smb is an SMB client and a relay over SMB Direct, for servers and
// clients that are not rdmanet: Linux's ksmbd and cifs.ko, or Windows.
//
//	smb check -addr 10.77.0.1:445 -share share -user u -password pw
//	smb relay -listen :445 -to fileserver:445
package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"time"

	smb2 "github.com/cloudsoda/go-smb2"

	"github.com/rdmanet/rdmanet"
)

// maxMessage is the length of the longest SMB message that is accepted: the payload of one
// read, and the headers.
const maxMessage = 8<<20 + 64<<10

var config = rdmanet.Config{RequireRDMA: true, MaxFragmentedSize: maxMessage}

func main() {
	log.SetFlags(0)
	commands := map[string]func([]string) error{"check": checkCommand, "relay": relayCommand}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		log.Fatal("usage: smb check|relay [flags]; smb check -h tells more")
	}
	if err := commands[os.Args[1]](os.Args[2:]); err != nil {
		log.Fatalf("smb %s: %v", os.Args[1], err)
	}
}

func checkCommand(args []string) error {
	var c check
	flags := flag.NewFlagSet("smb check", flag.ExitOnError)
	flags.StringVar(&c.addr, "addr", "", "host:port of the server: 445 on RoCE and InfiniBand, 5445 on iWARP")
	flags.StringVar(&c.share, "share", "share", "share, which must be writable")
	flags.StringVar(&c.user, "user", "", "user")
	flags.StringVar(&c.password, "password", "", "password")
	flags.IntVar(&c.size, "size", 8<<20, "bytes of the file that is written and read back")
	flags.Parse(args)
	if c.addr == "" {
		return errors.New("-addr is missing: which server?")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return c.run(ctx)
}

// check writes a file to a share, reads it back and removes it.
type check struct {
	addr, share, user, password string
	size                        int
}

// headroom is how many bytes an SMB message may need besides its data.
const headroom = 4 << 10

func (c *check) run(ctx context.Context) (err error) {
	nc, err := (&rdmanet.Dialer{Config: config}).DialContext(ctx, "rdma", c.addr)
	if err != nil {
		return err
	}
	conn := nc.(*rdmanet.Conn)
	defer conn.Close()
	fmt.Printf("connected: %+v\n", conn.Info())
	host, _, _ := net.SplitHostPort(c.addr)
	d := &smb2.Dialer{Initiator: &smb2.NTLMInitiator{User: c.user, Password: c.password}}
	session, err := d.DialConn(ctx, frame(conn), c.addr)
	if err != nil {
		return fmt.Errorf("session: %w", err)
	}
	defer session.Logoff()
	share, err := session.WithContext(ctx).Mount(`\\` + host + `\` + c.share)
	if err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	defer share.Umount()

	const name = "rdmanet-check"
	want := make([]byte, c.size)
	rand.Read(want)
	defer share.Remove(name)
	// A message must not be longer than the peer reassembles from segments.
	piece := min(conn.MaxMessageSize()-headroom, 512<<10)
	if err := writeFile(share, name, want, piece); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	sum, n, err := readFile(share, name, piece)
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if n != len(want) || sum != sha256.Sum256(want) {
		return fmt.Errorf("%d bytes were written, and %d others came back", len(want), n)
	}
	fmt.Printf("%+v\n", conn.Stats())
	fmt.Printf("ok: %d bytes written and read, SHA-256 %x\n", n, sum)
	return nil
}

func writeFile(share *smb2.Share, name string, b []byte, piece int) error {
	f, err := share.Create(name)
	if err != nil {
		return err
	}
	for len(b) > 0 && err == nil {
		k := min(len(b), piece)
		_, err = f.Write(b[:k])
		b = b[k:]
	}
	return errors.Join(err, f.Close())
}

func readFile(share *smb2.Share, name string, piece int) (sum [sha256.Size]byte, n int, err error) {
	f, err := share.Open(name)
	if err != nil {
		return sum, 0, err
	}
	defer f.Close()
	h := sha256.New()
	for buf := make([]byte, piece); ; {
		k, err := f.Read(buf)
		h.Write(buf[:k])
		n += k
		if err == io.EOF {
			return [sha256.Size]byte(h.Sum(nil)), n, nil
		}
		if err != nil {
			return sum, n, err
		}
	}
}

func relayCommand(args []string) error {
	flags := flag.NewFlagSet("smb relay", flag.ExitOnError)
	listen := flags.String("listen", ":445", "host:port to listen on over SMB Direct")
	to := flags.String("to", "", "host:port of an SMB server over TCP")
	keepAlive := flags.Duration("keepalive", 0, "how long a client may be silent before it is asked; 0 means 120s")
	flags.Parse(args)
	if *to == "" {
		return errors.New("-to is missing: which server?")
	}
	cfg := config
	cfg.KeepAlive = *keepAlive
	ln, err := (&rdmanet.ListenConfig{Config: cfg}).Listen(context.Background(), "rdma", *listen)
	if err != nil {
		return err
	}
	log.Printf("listening on %v", ln.Addr())
	return serveRelay(ln.(*rdmanet.Listener), *to)
}

func serveRelay(ln *rdmanet.Listener, to string) error {
	for {
		direct, err := ln.AcceptRDMA()
		if err != nil {
			return err
		}
		go func() {
			remote := direct.RemoteAddr()
			tcp, err := net.Dial("tcp", to)
			if err != nil {
				log.Printf("%v: %v", remote, err)
				direct.Close()
				return
			}
			log.Printf("%v: connected: %+v", remote, direct.Info())
			err = relay(direct, tcp)
			log.Printf("%v: ended (%v): %+v", remote, err, direct.Stats())
		}()
	}
}
