// Command http is a file server, and a client that fetches files from it and checks them by
// their SHA-256. Both use net/http unchanged. -h2 selects HTTP/2 over TLS.
package main

import (
	"context"
	"flag"
	"net"
	"os"

	"github.com/rdmanet/rdmanet/examples/internal/demo"
)

func main() {
	size := flag.Uint64("size", 1<<30, "server: `bytes` of the file "+madeName+" that it makes and removes again")
	dir := flag.String("dir", "", "server: serve this `directory` instead of a file made for the purpose")
	h2 := flag.Bool("h2", false, "server: HTTP/2 over TLS, with a certificate made for the purpose")

	demo.Main(demo.Program{
		Serve: func(ln net.Listener) error {
			if *dir == "" {
				made, remove, err := makeFile(int64(*size))
				if err != nil {
					return err
				}
				defer remove()
				*dir = made
			}
			if _, err := os.ReadDir(*dir); err != nil {
				return err
			}
			if !*h2 {
				return serve(ln, *dir)
			}
			cert, err := selfSigned()
			if err != nil {
				return err
			}
			return serveTLS(ln, *dir, cert)
		},
		Client: func(ctx context.Context, dial demo.DialFunc, addr string) (string, error) {
			names := flag.Args()
			if len(names) == 0 {
				names = []string{madeName}
			}
			return fetchAll(ctx, dial, addr, names)
		},
		Args: true,
	})
}
